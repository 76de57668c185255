"""`einmpi doctor`: what is installed here, whether ranks reach each other, what to do about what is missing."""
