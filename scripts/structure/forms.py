"""The registry of what leaves a process: helper processes, protocols between processes, and records on disk.

A test finds each module that starts a process, opens a socket, or writes JSON or pickles and stands in none of these
tables, and each that stands here and does not.
"""

from __future__ import annotations

HELPERS = {
    "a worker of a rank, a sender of replicas, an uploader, a watcher (each a Helper)": ("disk.helper",),
    "the keeper, which outlives the trainer": ("memory.keeper.process",),
}
"""Kinds of processes, with the modules that start them."""

PROTOCOLS = {
    "lines between a trainer and its helpers: pickles, with descriptors": ("disk.helper",),
    "requests to a keeper: JSON, with descriptors": ("memory.keeper.messages",),
    "links of the watchers of a job to that of rank 0": ("hangs.watcher", "distributed.job_link"),
    "replicas of images between hosts": (
        "memory.images.host_replicas",
        "memory.images.replica_sender",
    ),
    "objects of all ranks to the coordinator and back": ("distributed.exchange",),
}
"""What processes say to one another, with the modules that open sockets or pickle what is sent."""

RECORDS = {
    "lines of JSON under a digest: manifest.json, the record of a rank, head.json of a bucket": (
        "store.manifest",
        "store.files_of_ranks",
        "bucket.head_file",
        "checkpoint.state.subclasses",
    ),
    ".metadata and the items of a data file, as DCP has them": (
        "checkpoint.format.torch_item",
        "checkpoint.planning.rank_file",
    ),
    "the lock of a folder": ("store.holder",),
    "one JSON object in a file: pins, rollbacks, uploads, what verify found, why a checkpoint was set aside": (
        "store.manifest_fields",
        "store.pins",
        "store.rollbacks",
        "store.retired",
        "bucket.bucket_store",
        "uploading.record",
        "examining.verified",
    ),
    "the card of an image in memory": ("memory.images.card",),
    "lines of JSON: metrics, events, samples, the ledger": ("json_lines", "metrics.ledger"),
    "config.json of a run": ("config.manager",),
    "the token file of a corpus": ("data.token_corpus",),
    "what Hugging Face's libraries read, with the record of an export": (
        "converting.safetensors_files",
        "hugging_face.adapter",
        "hugging_face.last_export",
        "hugging_face.writing",
        "data.tokenizer",
        "models.llama.hugging_face",
    ),
    "what another trainer reads: torchtitan's positions, optimizer groups, the Trainer's mark": (
        "converting.layouts",
        "integrations.transformers",
    ),
    "torch's picture of a device's memory": ("metrics.profiling",),
}
"""Forms of what is written to disk, or to memory that outlives the process, with the modules that write them."""

INSIDE = {
    "a plan on its way to ranks and back": ("checkpoint.planning.joint_entries", "checkpoint.planning.rank_summary"),
    "values that are compared, or digested": ("checkpoint.planning.plan_cache", "checkpoint.planning.replicated"),
    "a state of each rank, inside a checkpoint's object": ("data.rank_state",),
    "what --json prints": ("cli.inspect_step", "cli.screen"),
}
"""Why other modules write JSON or pickles."""
