"""Forms of EinSums that are computed in ways of their own, and how they are recognised."""
