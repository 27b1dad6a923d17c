"""Tasks: models, data sets, and the losses and metrics that connect them.

The library ``spardl`` never imports this package. Your own task does not need it either, only
:class:`trainer.task.Task`.
"""
