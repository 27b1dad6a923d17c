"""Tools to use before training: predict step times, recommend a method, and check the cluster."""
