"""Tasks: models, data sets, and the losses and metrics that connect them.

The library ``spardl`` never imports this package. A task of your own needs only :class:`trainer.task.Task`.
"""
