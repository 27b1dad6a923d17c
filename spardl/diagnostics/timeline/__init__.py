"""The timeline model: predicts the time of a training step under each schedule from a profile and a network."""
