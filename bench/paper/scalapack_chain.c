/* The matrix chain (A·B) + (C·(D·E)) by ScaLAPACK, on a grid of ranks with block-cyclic matrices.
 *
 *     mpicc -o scalapack_chain scalapack_chain.c -lscalapack-mpich -lm
 *     mpirun -n 2 ./scalapack_chain BLOCK GRID_ROWS GRID_COLUMNS
 *
 * Blocks are smaller than BLOCK where some ranks would have no part of a matrix otherwise.
 * It takes the orders of bench/paper/node.py on standard input and answers as bench/lib/node_peers.py does.
 */

#include <mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LONGEST_SLEEP 1000 /* microseconds between two looks for an order */
#define DESCRIPTION 9      /* numbers that describe a matrix to ScaLAPACK */

void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *place, const int *first, const int *places);
void descinit_(int *description, const int *rows, const int *columns, const int *row_block,
               const int *column_block, const int *first_row, const int *first_column,
               const int *context, const int *leading, int *status);
void pdgemm_(const char *, const char *, const int *m, const int *n, const int *k,
             const double *alpha, const double *a, const int *ia, const int *ja, const int *da,
             const double *b, const int *ib, const int *jb, const int *db, const double *beta,
             double *c, const int *ic, const int *jc, const int *dc);
void psgemm_(const char *, const char *, const int *m, const int *n, const int *k,
             const float *alpha, const float *a, const int *ia, const int *ja, const int *da,
             const float *b, const int *ib, const int *jb, const int *db, const float *beta,
             float *c, const int *ic, const int *jc, const int *dc);

static int context, grid_rows, grid_columns, my_row, my_column;
static int most, block; /* rows and columns of a block: as given, and as used */
static int is_single; /* precision */

struct Matrix {
    int rows, columns;
    int local_rows, local_columns;
    int description[DESCRIPTION];
    void *elements; /* of this rank, column by column */
};

static struct Matrix make_matrix(int rows, int columns)
{
    const int zero = 0;
    struct Matrix m = {rows, columns, 0, 0, {0}, NULL};
    m.local_rows = numroc_(&rows, &block, &my_row, &zero, &grid_rows);
    m.local_columns = numroc_(&columns, &block, &my_column, &zero, &grid_columns);
    int leading = m.local_rows > 1 ? m.local_rows : 1;
    int status;
    descinit_(m.description, &rows, &columns, &block, &block, &zero, &zero, &context, &leading,
              &status);
    size_t elements = (size_t)leading * (m.local_columns > 1 ? m.local_columns : 1);
    m.elements = calloc(elements, is_single ? sizeof(float) : sizeof(double));
    if (status != 0 || m.elements == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    return m;
}

/* The index in the whole matrix of a local index. */
static int whole_index(int local, int place, int places)
{
    return (local / block * places + place) * block + local % block;
}

/* The elements that `values` of bench/lib/node_peers.py gives to matrix number `seed`. */
static void fill(struct Matrix *m, int seed)
{
    for (int j = 0; j < m->local_columns; j++) {
        double column = whole_index(j, my_column, grid_columns);
        double first = cos((column - seed) * 0.9);
        double second = cos(column * 1.3 + seed);
        for (int i = 0; i < m->local_rows; i++) {
            double row = whole_index(i, my_row, grid_rows);
            double value = sin((0.37 * seed + row) * 1.7) * first + sin(row * 0.31) * second;
            size_t place = (size_t)j * m->local_rows + i;
            if (is_single)
                ((float *)m->elements)[place] = (float)value;
            else
                ((double *)m->elements)[place] = value;
        }
    }
}

/* c = a·b, or c += a·b */
static void multiply(const struct Matrix *a, const struct Matrix *b, struct Matrix *c, int adds)
{
    const int one = 1;
    if (is_single) {
        float alpha = 1, beta = adds;
        psgemm_("N", "N", &c->rows, &c->columns, &a->columns, &alpha, a->elements, &one, &one,
                a->description, b->elements, &one, &one, b->description, &beta, c->elements, &one,
                &one, c->description);
    } else {
        double alpha = 1, beta = adds;
        pdgemm_("N", "N", &c->rows, &c->columns, &a->columns, &alpha, a->elements, &one, &one,
                a->description, b->elements, &one, &one, b->description, &beta, c->elements, &one,
                &one, c->description);
    }
}

static struct Matrix A, B, C, D, E, T, Z;

static void prepare(int size, int skew)
{
    struct Matrix *all[] = {&A, &B, &C, &D, &E, &T, &Z};
    int thin = size / skew, wide = size * skew;
    int share = thin / (grid_rows > grid_columns ? grid_rows : grid_columns);
    block = share < 1 ? 1 : share < most ? share : most;
    int shapes[][2] = {{size, thin}, {thin, size}, {size, thin}, {thin, wide},
                       {wide, size}, {thin, size}, {size, size}};
    for (int number = 0; number < 7; number++) {
        free(all[number]->elements);
        *all[number] = make_matrix(shapes[number][0], shapes[number][1]);
        if (number < 5)
            fill(all[number], 1 + number);
    }
}

static double compute(void)
{
    double start, own, slowest;
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    MPI_Pcontrol(1);
    multiply(&D, &E, &T, 0);
    multiply(&A, &B, &Z, 0);
    multiply(&C, &T, &Z, 1);
    MPI_Pcontrol(0);
    own = MPI_Wtime() - start;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static double sum_of_result(void)
{
    double own = 0, sum;
    size_t elements = (size_t)Z.local_rows * Z.local_columns;
    for (size_t place = 0; place < elements; place++)
        own += is_single ? ((float *)Z.elements)[place] : ((double *)Z.elements)[place];
    MPI_Allreduce(&own, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

/* The whole number after a key in a line of JSON. */
static int number_after(const char *line, const char *key)
{
    const char *found = strstr(line, key);
    return found ? atoi(found + strlen(key)) : 0;
}

/* Read the next order on the first rank; the others sleep until it is there. */
static int next_order(char *line, int length, int rank)
{
    MPI_Request request;
    int is_done = 0;
    if (rank == 0 && fgets(line, length, stdin) == NULL)
        line[0] = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    while (MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), !is_done)
        usleep(LONGEST_SLEEP);
    MPI_Bcast(line, length, MPI_CHAR, 0, MPI_COMM_WORLD);
    return line[0] != 0;
}

int main(int count, char **arguments)
{
    char line[1024];
    int rank;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (count < 4) {
        if (rank == 0)
            fprintf(stderr, "expected BLOCK GRID_ROWS GRID_COLUMNS\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    most = atoi(arguments[1]);
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", atoi(arguments[2]), atoi(arguments[3]));
    Cblacs_gridinfo(context, &grid_rows, &grid_columns, &my_row, &my_column);
    while (next_order(line, sizeof line, rank)) {
        if (strstr(line, "\"do\": \"prepare\"")) {
            is_single = strstr(line, "\"float32\"") != NULL;
            prepare(number_after(line, "\"size\": "), number_after(line, "\"skew\": "));
            if (rank == 0)
                printf("answer null\n");
        } else {
            double seconds = compute();
            double sum = sum_of_result();
            if (rank == 0)
                printf("answer [%.9f, %.17g]\n", seconds, sum);
        }
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
