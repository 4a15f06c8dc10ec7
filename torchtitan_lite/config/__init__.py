"""The configuration: what a training loop of your own says of its job, as values. Without torch."""

from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig

__all__ = ["Checkpoint", "Job", "JobConfig"]
