# A package of Spack: packages/py_einmpi/package.py in a repository of your own, or in Spack's.
# ruff: noqa: F403, F405, I001 (Spack's own style)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyEinmpi(PythonPackage):
    """Extended Einstein summation over MPI: mathematics becomes a distributed program."""

    homepage = "https://github.com/einmpi/einmpi"
    git = "https://github.com/einmpi/einmpi.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("cuda", default=False, description="Compute on GPUs with CuPy")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@2.1:")
        depends_on("py-scipy@1.11:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-h5py@3.10:")
        depends_on("py-opt-einsum@3.4:")
        depends_on("py-numba@0.60:")
        depends_on("py-ml-dtypes@0.5:")
        depends_on("py-rich@13:")
        depends_on("py-threadpoolctl@3:")
        depends_on("py-cupy@13:", when="+cuda")
