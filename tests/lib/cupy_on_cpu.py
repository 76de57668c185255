"""A stand-in for CuPy that runs CUDA kernels on the CPU: g++ compiles them, threads take turns.

The text of a kernel is the one that a GPU gets, except for device_functions.DEVICE. There are no
streams and no copies: these are tested with fake_cupy.
"""

import ctypes
import subprocess
import tempfile
import types
from functools import cache
from pathlib import Path

import numpy as np

from einmpi.kernels.cuda.device_functions import DEVICE

# Threads are fibres: at __syncthreads the next thread of the block continues.
HOST = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#define FN static inline
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
struct Dim { unsigned x, y; };
static Dim blockIdx, threadIdx;
static ucontext_t scheduler;
static ucontext_t fibres[1024];
static char over[1024], stacks[1024][65536];
static void __syncthreads() { swapcontext(&fibres[threadIdx.x], &scheduler); }
static void atomicMin(long long* p, long long x) { if (x < *p) *p = x; }
static void atomicMax(long long* p, long long x) { if (x > *p) *p = x; }
static long long lanes[1024];
template <class T> T from_lane(T x, int mask) {
  memcpy(&lanes[threadIdx.x], &x, sizeof(T)); __syncthreads();
  memcpy(&x, &lanes[threadIdx.x ^ mask], sizeof(T)); __syncthreads();
  return x;
}
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
template <class T, class S> T bits_of(S x) { T y; memcpy(&y, &x, sizeof(y)); return y; }
FN float load(Half x) {
  int e = x.bits >> 10 & 31, f = x.bits & 1023;
  float y = e == 31 ? (f ? NAN : INFINITY) : e ? ldexpf(1024.f + f, e - 25) : ldexpf((float)f, -24);
  return x.bits & 0x8000 ? -y : y;
}
FN float load(Brain x) { return bits_of<float>((uint32_t)x.bits << 16); }
FN Half to_half(double x) {
  unsigned short s = signbit(x) ? 0x8000 : 0;
  if (isnan(x)) return {(unsigned short)(s | 0x7e00)};
  double a = fabs(x);
  if (a >= 65520) return {(unsigned short)(s | 0x7c00)};
  int e = a < 6.103515625e-5 ? -14 : ilogb(a);
  long f = lrint(ldexp(a, 10 - e));
  return {(unsigned short)(s | (f + ((long)(e + 14) << 10)))};
}
FN Half to_half(float x) { return to_half((double)x); }
FN Brain to_brain(float x) {
  uint32_t b = bits_of<uint32_t>(x);
  return {(unsigned short)(x != x ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
FN float infinity(float) { return INFINITY; }
FN double infinity(double) { return INFINITY; }
FN float not_a_number(float) { return NAN; }
FN double not_a_number(double) { return NAN; }
"""
RUN = r"""
static const long long* given;
static void fibre() {
  start(given);
  over[threadIdx.x] = 1;
  swapcontext(&fibres[threadIdx.x], &scheduler);
}
extern "C" void run(unsigned blocks, unsigned parts, unsigned threads, const long long* values) {
  given = values;
  for (blockIdx.y = 0; blockIdx.y < parts; ++blockIdx.y)
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (unsigned t = 0; t < threads; ++t) {
      getcontext(&fibres[t]);
      fibres[t].uc_stack.ss_sp = stacks[t]; fibres[t].uc_stack.ss_size = 65536;
      makecontext(&fibres[t], fibre, 0);
      over[t] = 0;
    }
    for (bool more = true; more;) {
      more = false;
      for (unsigned t = 0; t < threads; ++t) {
        threadIdx.x = t;
        if (!over[t]) { swapcontext(&scheduler, &fibres[t]); more = more || !over[t]; }
      }
    }
  }
}
"""


FOLDER = tempfile.TemporaryDirectory(prefix="einmpi-cuda-")


@cache
def build(code):
    """Compile a C++ text to a shared library, and load it."""
    name = str(len(list(Path(FOLDER.name).iterdir())))
    text, path = (Path(FOLDER.name) / f"{name}{end}" for end in (".cpp", ".so"))
    text.write_text(code)
    command = [
        "g++",
        "-std=c++17",
        "-O0",
        "-w",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
    ]
    subprocess.run([*command, str(text), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


class RawModule:
    def __init__(self, code, options):
        assert code.startswith(DEVICE)
        self.code = HOST + code.removeprefix(DEVICE)

    def get_function(self, name):
        head = self.code.rpartition(f" {name}(")[2]
        given = head.partition(") {")[0].replace("__restrict__", "").split(",")
        kinds = [part.strip().rpartition(" ")[0] for part in given]
        args = ", ".join(f"({kind})values[{k}]" for k, kind in enumerate(kinds))
        start = f"static void start(const long long* values) {{ {name}({args}); }}\n"
        library = build(self.code + start + RUN)

        def launch(grid, block, values):
            library.run(grid[0], grid[1], block[0], (ctypes.c_longlong * len(values))(*values))

        return launch


def address_of(array):
    return array.__array_interface__["data"][0]


def call(function, *values):
    """Call a function of addresses and counts."""
    function(*map(ctypes.c_longlong, values))


class Data:
    def __init__(self, ptr):
        self.ptr = ptr


class ndarray(np.ndarray):
    data = property(lambda self: Data(address_of(self)))

    def get(self):
        return np.array(self)


def asarray(array, *rest):
    return np.asarray(array, *rest).view(ndarray)


def gemm(
    handle,
    opa,
    opb,
    m,
    n,
    k,
    alpha,
    a,
    ta,
    lda,
    da,
    b,
    tb,
    ldb,
    db,
    beta,
    c,
    tc,
    ldc,
    dc,
    batch,
    sums,
    algo,
):
    """Stand in for gemmStridedBatchedEx, where the columns of a matrix are contiguous."""
    names = {
        2: "float16",
        14: "bfloat16",
        0: "float32",
        1: "float64",
        4: "complex64",
        5: "complex128",
    }
    dtype = np.dtype(names[tc])
    assert ta == tb == tc and beta == alpha + (4 if dtype.itemsize == 2 else dtype.itemsize)
    kind = np.dtype("float32") if dtype.itemsize == 2 else dtype
    scale, kept = np.frombuffer((ctypes.c_char * (2 * kind.itemsize)).from_address(alpha), kind)

    def matrix(address, op, rows, columns, line):
        rows, columns = (columns, rows) if op else (rows, columns)
        assert line >= rows
        size = dtype.itemsize
        memory = (ctypes.c_char * (((columns - 1) * line + rows) * size)).from_address(address)
        whole = np.ndarray((rows, columns), dtype, memory, 0, (size, line * size))
        return whole.conj().T if op == 2 else whole.T if op else whole

    for number in range(batch):
        x = matrix(a + number * da * dtype.itemsize, opa, m, k, lda)
        y = matrix(b + number * db * dtype.itemsize, opb, k, n, ldb)
        z = matrix(c + number * dc * dtype.itemsize, 0, m, n, ldc)
        product = scale * (x.astype(kind) @ y.astype(kind))
        z[...] = (product + kept * z.astype(kind) if kept else product).astype(dtype)


def gemm_alone(
    handle, opa, opb, m, n, k, alpha, a, ta, lda, b, tb, ldb, beta, c, tc, ldc, sums, algo
):
    gemm(
        handle,
        opa,
        opb,
        m,
        n,
        k,
        alpha,
        a,
        ta,
        lda,
        0,
        b,
        tb,
        ldb,
        0,
        beta,
        c,
        tc,
        ldc,
        0,
        1,
        sums,
        algo,
    )


def module():
    """Return the module that `import cupy` is to find."""
    made = types.ModuleType("cupy")
    blas = types.SimpleNamespace(
        gemmEx=gemm_alone,
        gemmStridedBatchedEx=gemm,
        getMathMode=lambda handle: 0,
        setMathMode=lambda handle, mode: None,
    )
    device = types.SimpleNamespace(get_cublas_handle=lambda: 0)
    made.__dict__.update(
        RawModule=RawModule,
        ndarray=ndarray,
        asarray=asarray,
        empty=lambda shape, dtype: asarray(np.empty(shape, dtype)),
        maximum=np.maximum,
        minimum=np.minimum,
        where=lambda *given: asarray(np.where(*given)),
        arange=lambda stop: asarray(np.arange(stop)),
        argsort=lambda array: asarray(np.argsort(array, kind="stable")),
        searchsorted=lambda values, wanted: asarray(np.searchsorted(values, wanted)),
        zeros=lambda shape, dtype: asarray(np.zeros(shape, dtype)),
        ascontiguousarray=lambda array: asarray(np.ascontiguousarray(array)),
        cuda=types.SimpleNamespace(cublas=blas, device=device),
    )
    return made
