"""Gradients averaged in a training loop that is not ours: DDP, FSDP2, plain loops, other people's trainers."""
