"""Nonuniform tensor parallelism for PyTorch Lightning: replicas of unequal tensor-parallel degree train one model exactly."""
