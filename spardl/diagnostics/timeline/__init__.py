"""The timeline model: how long a training step takes under each schedule, from a profile and a network."""
