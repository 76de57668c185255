"""Functions of scipy.special that are imported without the package around them."""

import subprocess
import sys


def answer(code):
    """Run Python code in a new interpreter; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_normal_numbers_are_those_of_scipy_and_import_little():
    code = """
import sys
import numpy as np
from einmpi.special_functions import special_function
ndtri, erf = special_function("ndtri"), special_function("erf")
print("scipy.special" in sys.modules, "numpy.f2py" in sys.modules)
import scipy.special, scipy.stats
x = (np.arange(1, 100000) + 0.5) * 2.0**-17
print(np.array_equal(ndtri(x), scipy.special.ndtri(x)))
print(np.array_equal(erf(x), scipy.special.erf(x)))
print(scipy.special._ufuncs.ndtri is ndtri, scipy.stats.norm.ppf(0.5) == 0)
"""
    assert answer(code) == ["False", "False", "True", "True", "True", "True"]


def test_another_thread_may_import_the_package_at_the_same_time():
    code = """
import importlib, sys, threading
from einmpi import special_functions
found = []
def import_it():
    from scipy.special import gamma
    found.append(float(gamma(4.0)))
thread = threading.Thread(target=import_it)
load = importlib.import_module
def load_slowly(name):
    if name.endswith("_ufuncs"):
        thread.start()
        thread.join(0.5)  # it waits
        found.append(thread.is_alive())
    return load(name)
special_functions.importlib.import_module = load_slowly
print(float(special_functions.special_function("ndtri")(0.5)))
thread.join()
print(*found, type(sys.modules["scipy.special"]).__name__)
"""
    assert answer(code) == ["0.0", "True", "6.0", "module"]


def test_a_scipy_that_has_them_elsewhere_is_imported_whole():
    code = """
import sys
sys.modules["scipy.special._ufuncs"] = None
from einmpi import special_functions
print(special_functions._compiled_functions(), "scipy.special" in sys.modules)
del sys.modules["scipy.special._ufuncs"]
special_functions._compiled_functions = lambda: None
print(float(special_functions.special_function("ndtri")(0.5)), "scipy.special" in sys.modules)
"""
    assert answer(code) == ["None", "False", "0.0", "True"]
