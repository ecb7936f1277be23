"""The same failures under several policies: what `bench_policies` runs.

drill.py           which GPU is lost and returns at which step, and who may work then
model.py           what all of them train, and how the result is judged
job.py             a job of ours: forks the workers and supervises them; a replacement waits for its GPU
training.py        a worker: the Trainer, with a least time for a step, hit by the drill
torchft_groups.py  a torchft job: lighthouse and scheduler
torchft_job.py     its replica groups and ranks
record.py          steps and failures become a `RunRecord` for the simulator
"""
