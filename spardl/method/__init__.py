"""A method: a compressor, a communicator, a residual and a momentum that fit together, by name or one by one."""
