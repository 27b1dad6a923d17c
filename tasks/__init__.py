"""Tasks to train: models, data sets, and what ties a model to its data.

The library ``spardl`` never imports this package; a task of your own needs nothing from here either,
only :class:`trainer.task.Task`.
"""
