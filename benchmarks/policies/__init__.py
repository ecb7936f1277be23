"""The same failures under several policies: what `bench_policies` runs.

drill.py      which GPU is lost and returns at which step, and who works then
job.py        a worker of ours: waits for its GPU if it has to, then training.py
training.py   the Trainer: small llama, paced like GPUs that do not share a core
torchft_job   the same model under torchft, and the launcher of its groups
record.py     steps and failures become a `RunRecord` for the simulator
"""
