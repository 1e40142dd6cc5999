"""The command ``actmem``: record what any model saves for backward, and plan which training job fits on which GPUs."""
