"""Model builders. Properties of the data (classes, channels, vocabulary) are keyword arguments."""
