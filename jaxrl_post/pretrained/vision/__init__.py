"""Vision towers in model directories, and the files of their picture processors."""
