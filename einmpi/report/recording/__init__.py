"""What every rank did and when, recorded in a run: timelines, traces, summaries."""
