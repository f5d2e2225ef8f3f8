"""Load generation and measurement: pacing, inputs, targets, statistics and reports."""
