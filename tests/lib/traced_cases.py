"""Functions written with numpy, and the programs that say the same by hand."""

import numpy as np

import einmpi


def chain(A, B, C, D, E):
    return A @ B + C @ (D @ E)


def attention(Q, K, V):
    scores = np.einsum("hsd,htd->hst", Q, K) / np.sqrt(Q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ V


def kmeans_step(X, C):
    distances = ((X[:, None] - C[None]) ** 2).sum(-1)
    is_nearest = distances.argmin(1)[:, None] == np.arange(C.shape[0])
    counts = np.maximum(is_nearest.sum(0), 1)
    return np.where(is_nearest[:, :, None], X[:, None], 0.0).sum(0) / counts[:, None]


def mlp_loss(W1, W2, X, Y):
    return ((np.maximum(X @ W1, 0) @ W2 - Y) ** 2).mean()


def mlp_step(W1, W2, X, Y, rate):
    gradients = einmpi.grad(mlp_loss, wrt=(0, 1))(W1, W2, X, Y)
    return W1 - rate * gradients[0], W2 - rate * gradients[1]


def heat(u):
    new = u.copy()
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    new[1:-1, 1:-1] = u[1:-1, 1:-1] + 0.1 * (around - 4 * u[1:-1, 1:-1])
    return new


def pca_step(X, V):
    centred = X - X.mean(0)
    image = centred.T @ (centred @ V)
    return image / np.sqrt((image**2).sum(0))


# The function, the shapes of its arguments, and its program, with the same names of inputs.
BY_HAND = {
    "chain": (
        chain,
        {"A": (40, 60), "B": (60, 30), "C": (40, 20), "D": (20, 50), "E": (50, 30)},
        "out[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))",
    ),
    "attention": (
        attention,
        {"Q": (4, 12, 8), "K": (4, 10, 8), "V": (4, 10, 8)},
        """
        S[h,s,t] = sum(Q[h,s,d] * K[h,t,d]) / 2.8284271247461903
        P[h,s,t] = exp(S[h,s,t] - max[t](S[h,s,t]))
        R[h,s,t] = P[h,s,t] / sum[t](P[h,s,t])
        out[h,s,d] = sum(R[h,s,t] * V[h,t,d])
        """,
    ),
    "kmeans": (
        kmeans_step,
        {"X": (64, 3), "C": (5, 3)},
        """
        near[i,k:5] = argmin[c](sum[d]((X[i,d] - C[c,d])**2)) == k
        count_[k] = maximum(sum[i](near[i,k]), 1)
        out[k,d] = sum[i](where(near[i,k], X[i,d], 0.0)) / count_[k]
        """,
    ),
    "mlp": (
        mlp_step,
        {"W1": (12, 16), "W2": (16, 4), "X": (24, 12), "Y": (24, 4), "rate": 0.1},
        """
        H[b,h] = maximum(sum(X[b,i] * W1[i,h]), 0)
        loss = mean((sum[h](H[b,h] * W2[h,l]) - Y[b,l])**2)
        out[i,h] = W1[i,h] - rate * grad(loss, W1[i,h])
        out1[h,l] = W2[h,l] - rate * grad(loss, W2[h,l])
        """,
    ),
    "heat": (
        heat,
        {"u": (24, 20)},
        "out[i,j] = where((i >= 1) & (i <= 22) & (j >= 1) & (j <= 18), u[i,j] + 0.1 * (u[i-1,j]"
        " + u[i+1,j] + u[i,j-1] + u[i,j+1] - 4 * u[i,j]), u[i,j])",
    ),
    "pca": (
        pca_step,
        {"X": (48, 12), "V": (12, 3)},
        """
        Z[n,i] = X[n,i] - mean[n](X[n,i])
        W[i,k] = sum(Z[n,i] * sum[j](Z[n,j] * V[j,k]))
        length[k] = sqrt(sum[j](W[j,k]**2))
        out[i,k] = W[i,k] / length[k]
        """,
    ),
}
