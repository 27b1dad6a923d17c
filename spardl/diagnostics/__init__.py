"""Before a training: how long will a step take, what pays, is the cluster well."""
