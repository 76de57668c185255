"""Estimators, metrics and tools of scikit-learn that take arrays of any array API library.

They are from its page on array API support. A case is a function of arrays in one namespace; its
results are arrays and numbers, which are compared with those that it has with numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import sklearn
from sklearn import metrics
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import (
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
)
from sklearn.metrics import pairwise
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.preprocessing import (
    KernelCenterer,
    LabelBinarizer,
    LabelEncoder,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    StandardScaler,
)

ROWS = 61  # by default: a prime, so that ranks have different numbers of them


class Data(NamedTuple):
    """The arrays that every case is given, all with one row or number for each observation."""

    points: Any  # in four dimensions
    positive: Any  # the same, without negative coordinates
    classes: Any  # of the points: 0, 1, 2
    is_positive: Any  # two classes, 0 and 1
    number: Any  # to be predicted from a point
    count: Any  # to be predicted from a point
    guessed_class: Any
    guessed_number: Any
    chance: Any  # of class 1, of two
    chances: Any  # of three classes


def make_data(asarray: Callable[[Any], Any], rows: int = ROWS) -> Data:
    """Return the same observations, as arrays of a library."""
    generator = np.random.default_rng(0)
    points = generator.normal(size=(rows, 4))
    classes = np.arange(rows) % 3
    points[:, 0] += 2 * classes
    number = points @ [1.0, -2.0, 0.5, 0.0] + generator.normal(size=rows) / 10
    wrong = generator.random(rows) < 0.2
    chances = generator.random((rows, 3)) + np.eye(3)[classes]
    data = Data(
        points,
        np.abs(points),
        classes,
        (number > 0).astype(np.int64),
        number,
        generator.poisson(np.exp(points[:, 1] / 2)).astype(np.float64),
        np.where(wrong, (classes + 1) % 3, classes),
        number + generator.normal(size=rows),
        1 / (1 + np.exp(-number - generator.normal(size=rows))),
        chances / chances.sum(axis=1, keepdims=True),
    )
    return Data(*map(asarray, data))


def transformed(estimator: Any, data: Data) -> list[Any]:
    return [estimator.fit(data.points).transform(data.points)]


def classified(estimator: Any, data: Data) -> list[Any]:
    """Return predictions, probabilities if there are any, and the fraction that is right."""
    estimator.fit(data.points, data.classes)
    results = [estimator.predict(data.points), estimator.score(data.points, data.classes)]
    if hasattr(estimator, "predict_proba"):
        results.append(estimator.predict_proba(data.points))
    return results


def predicted(estimator: Any, data: Data, wanted: str = "number") -> list[Any]:
    estimator.fit(data.points, getattr(data, wanted))
    return [estimator.coef_, estimator.predict(data.points)]


def decomposed(data: Data) -> list[Any]:
    pca = PCA(n_components=2, svd_solver="full")
    coordinates = pca.fit_transform(data.points)
    return [coordinates, pca.explained_variance_ratio_, pca.inverse_transform(coordinates)]


def mixed(data: Data) -> list[Any]:
    mixture = GaussianMixture(3, init_params="random_from_data", random_state=0, max_iter=10)
    labels = mixture.fit_predict(data.points)
    return [labels, mixture.means_, mixture.covariances_, mixture.score_samples(data.points)]


def centred(data: Data) -> list[Any]:
    kernel = pairwise.linear_kernel(data.points)
    return [KernelCenterer().fit_transform(kernel)]


def encoded(encoder: Any, data: Data) -> list[Any]:
    codes = encoder.fit_transform(data.classes)
    return [codes, encoder.classes_, encoder.inverse_transform(codes)]


def searched(data: Data) -> list[Any]:
    search = GridSearchCV(Ridge(solver="svd"), {"alpha": [0.1, 1.0, 10.0]}, cv=3)
    search.fit(data.points, data.number)
    return [search.best_score_, search.best_params_["alpha"], search.predict(data.points)]


def split(data: Data) -> list[Any]:
    return train_test_split(data.points, data.classes, test_size=0.25, random_state=0)


def measured(metric: Callable[..., Any], names: str, data: Data) -> list[Any]:
    found = metric(*(getattr(data, name) for name in names.split()))
    return list(found) if isinstance(found, tuple) else [found]


def f1_of_each(data: Data) -> list[Any]:
    return [metrics.f1_score(data.classes, data.guessed_class, average=None)]


Case = Callable[[Data], list[Any]]
CASES: dict[str, Case] = {
    # preprocessing and decomposition
    "KernelCenterer": centred,
    "LabelBinarizer": lambda data: encoded(LabelBinarizer(), data),
    "LabelEncoder": lambda data: encoded(LabelEncoder(), data),
    "MaxAbsScaler": lambda data: transformed(MaxAbsScaler(), data),
    "MinMaxScaler": lambda data: transformed(MinMaxScaler(), data),
    "Normalizer": lambda data: transformed(Normalizer(), data),
    "PolynomialFeatures": lambda data: transformed(PolynomialFeatures(3), data),
    "StandardScaler": lambda data: transformed(StandardScaler(), data),
    "Nystroem": lambda data: transformed(Nystroem(n_components=7, random_state=0), data),
    "PCA": decomposed,
    # models
    "CalibratedClassifierCV": lambda data: classified(
        CalibratedClassifierCV(LinearDiscriminantAnalysis(), method="temperature", cv=3), data
    ),
    "GaussianMixture": mixed,
    "GaussianNB": lambda data: classified(GaussianNB(), data),
    "LinearDiscriminantAnalysis": lambda data: classified(LinearDiscriminantAnalysis(), data),
    "LogisticRegression": lambda data: classified(LogisticRegression(tol=1e-8), data),
    "PoissonRegressor": lambda data: predicted(PoissonRegressor(tol=1e-8), data, "count"),
    "Ridge": lambda data: predicted(Ridge(solver="svd"), data),
    "RidgeCV": lambda data: predicted(RidgeCV(), data),
    "RidgeClassifier": lambda data: classified(RidgeClassifier(solver="svd"), data),
    "RidgeClassifierCV": lambda data: classified(RidgeClassifierCV(), data),
    # selection of models
    "GridSearchCV": searched,
    "train_test_split": split,
    # metrics
    "accuracy_score": partial(measured, metrics.accuracy_score, "classes guessed_class"),
    "brier_score_loss": partial(measured, metrics.brier_score_loss, "is_positive chance"),
    "confusion_matrix": partial(measured, metrics.confusion_matrix, "classes guessed_class"),
    "f1_score": f1_of_each,
    "log_loss": partial(measured, metrics.log_loss, "classes chances"),
    "mean_squared_error": partial(measured, metrics.mean_squared_error, "number guessed_number"),
    "r2_score": partial(measured, metrics.r2_score, "number guessed_number"),
    "rbf_kernel": partial(measured, pairwise.rbf_kernel, "points positive"),
    "roc_curve": partial(measured, metrics.roc_curve, "is_positive chance"),
}


def results_of(name: str, data: Data) -> list[Any]:
    """Return the results of a case, computed in the namespace of its arrays."""
    with sklearn.config_context(array_api_dispatch=True):
        return CASES[name](data)


# Optimizers stop within 1e-8 of the optimum, in sums that are in another order; a prediction from
# there differs by less than this. Everything else is exact but for the order of sums.
TOLERANCE = 1e-6


def difference(found: Iterable[Any], wanted: Iterable[Any]) -> str:
    """Return what is wrong with results as numpy's arrays; an empty text if nothing is."""
    try:
        for result, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(result, right, TOLERANCE, TOLERANCE)
    except (AssertionError, ValueError) as error:
        return " ".join(str(error).split())
    return ""
