"""Opens the parts of a run, once for every program: engine, collector, trainer."""
