"""The training engine on FSDP2: shard, step, checkpoint."""
