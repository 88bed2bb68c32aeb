"""Checkpoints that are whole or absent, and hold nothing but safetensors and JSON.

    checkpoints/step-00000020/
        rank-00000.safetensors   each rank's shards of weights and optimizer state, and its generators
        manifest.json            step, loop state, size and SHA-256 of every file
        COMPLETE                 SHA-256 of manifest.json; written last

storage.py keeps copies of them behind a URL, in the same layout.

torch.distributed.checkpoint is not used: its metadata file is a pickle, and its commit is not atomic.
"""
