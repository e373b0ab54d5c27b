"""From rewards to advantages: what a sample is credited with, or each of its tokens."""
