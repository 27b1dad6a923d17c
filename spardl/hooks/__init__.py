"""Gradient averaging in user-defined training loops: DDP, FSDP2, plain loops and third-party trainers."""
