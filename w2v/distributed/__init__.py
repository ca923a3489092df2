"""Training by several processes: ranks, torchrun, exchange of rows."""
