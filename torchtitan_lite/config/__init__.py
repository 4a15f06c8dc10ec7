"""The configuration of a job, as plain values that a training loop of your own can make. Imports no torch."""

from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig

__all__ = ["Checkpoint", "Job", "JobConfig"]
