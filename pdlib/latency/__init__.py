"""The latency model: a page of arithmetic, calibrated on rows; predicts times with an interval.

fit = latency.fit(rows, device)                       # rows of one machine, its peaks
fit.predict(latency.decode(8, [512, 1024]), model)    # seconds, low, high, warning
latency.errors(latency.holdout(rows, device, by="shape"))
"""

from pdlib.latency.fitting import Fit, fit
from pdlib.latency.form import NAMES, PARAMETERS, Fast
from pdlib.latency.heldout import a100, calibrated, calibrated_path, errors, holdout, predicted
from pdlib.latency.work import APART, SHAPE, Work, decode, mixed, of_rows, prefill, shapes

__all__ = [
    "APART",
    "NAMES",
    "PARAMETERS",
    "SHAPE",
    "Fast",
    "Fit",
    "Work",
    "a100",
    "calibrated",
    "calibrated_path",
    "decode",
    "errors",
    "fit",
    "holdout",
    "mixed",
    "of_rows",
    "predicted",
    "prefill",
    "shapes",
]
