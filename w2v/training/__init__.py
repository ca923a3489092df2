"""Plan and run training: step, loop, checkpoints, metrics."""
