"""The random order of the tasks, as a grain iterator that can be checkpointed."""

import grain

__all__ = ["task_indices"]


def task_indices(num_tasks: int, seed: int) -> grain.DatasetIterator:
    """Iterates over task indices without end, each epoch in another random order.

    The iterator's position is part of a checkpoint: a resumed run draws the same tasks
    as an uninterrupted run.

    Args:
        num_tasks: number of tasks, at least 1.
        seed: seed of the random order.

    >>> indices = task_indices(3, seed=0)
    >>> sorted(next(indices) for _ in range(3))
    [0, 1, 2]
    """
    if num_tasks < 1:
        raise ValueError(f"task_indices: the data set is empty; got {num_tasks} tasks")
    dataset = grain.MapDataset.range(num_tasks).seed(seed).shuffle().repeat()
    # No prefetching threads: drawing an integer takes no time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.to_iter_dataset(options))
