"""Tasks: models, data sets, and the losses and metrics that connect them.

The library ``spardl`` never imports this package; a task of your own needs nothing from here either,
only :class:`trainer.task.Task`.
"""
