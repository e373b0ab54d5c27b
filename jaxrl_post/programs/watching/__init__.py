"""Programs that watch: rules on the metrics of a step, and tests of a reward."""
