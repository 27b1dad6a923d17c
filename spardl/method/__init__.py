"""Methods: combinations of a compressor, a communicator, a residual and a momentum, made from parts or by name."""
