/* Counts what the ranks of an MPI program receive from each other, between the calls of MPI.
 *
 *     mpicc -shared -fPIC -o libcount.so count.c
 *     mpirun -n 4 -genv LD_PRELOAD ./libcount.so -genv PMPI_COUNTS folder program
 *
 * The functions here have the names of MPI's and call MPI's own by their second names, PMPI_…. The
 * program says what is counted: from MPI_Pcontrol(1) to MPI_Pcontrol(0). Then each rank adds a line
 * to the file <folder>/<rank>.jsonl:
 *
 *     {"ranks": 2, "calls": {"MPI_Isend": [1, 0]}, "sent": [0, 800], "sent_control": [0, 32]}
 *
 * `calls` has the number of calls and the bytes that this rank receives by them. Of a message only
 * the sender knows how much it carries, so its bytes are not there but in `sent`, by the rank in the
 * world that receives it, or in `sent_control` if it has the tag PMPI_CONTROL_TAG. What stays on a
 * rank is not counted. A collective call counts as the least that any algorithm of it has to move:
 *
 *     Bcast        a copy to each rank but the root
 *     (All)gather, Alltoall, Scatter    each piece once to each rank that gets it
 *     Reduce       (p − 1) n, at the root         Reduce_scatter    (p − 1) own pieces
 *     Allreduce    reduce-scatter, then allgather: 2 (p − 1) n over all ranks
 *     Scan         n at each rank but the first
 *
 * Not counted: neighbour collectives, partitioned messages, MPI_R… one-sided calls, files, and
 * memory that ranks share. None of the programs here uses them where they are counted.
 */

#include <mpi.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_CALLS 128    /* names of MPI's calls that a program uses */
#define MOST_REQUESTS 4096 /* prepared calls that exist at the same time */

typedef long long Bytes;

struct Call {
    const char *name;
    long times;
    Bytes received;
};

struct Prepared {
    MPI_Request request;
    const char *name; /* NULL: the place is free */
    Bytes received;   /* by this rank, if `to` is none */
    Bytes sent;
    int to; /* a rank of the world, or −1 */
    int is_control;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_counting = 0;
static int control_tag = -1;
static int world_size = 0;
static struct Call calls[MOST_CALLS];
static struct Prepared prepared[MOST_REQUESTS];
static Bytes *sent[2]; /* payload and control, by the rank that receives */

static void stop_with(const char *problem)
{
    fprintf(stderr, "count.c: %s\n", problem);
    PMPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- sizes ---- */

static Bytes size_of(MPI_Datatype type)
{
    MPI_Count size;
    PMPI_Type_size_x(type, &size);
    return size;
}

static Bytes bytes_of(Bytes count, MPI_Datatype type)
{
    return count * size_of(type);
}

static int rank_in(MPI_Comm comm)
{
    int rank;
    PMPI_Comm_rank(comm, &rank);
    return rank;
}

static int is_root(int root, MPI_Comm comm)
{
    return rank_in(comm) == root;
}

static Bytes others(MPI_Comm comm)
{
    int size;
    PMPI_Comm_size(comm, &size);
    return size - 1;
}

/* The elements that a rank receives if each sums its share, then gathers the others'. */
static Bytes allreduce_elements(Bytes count, MPI_Comm comm)
{
    Bytes ranks = others(comm) + 1;
    Bytes share = count / ranks + (rank_in(comm) < count % ranks);
    return (ranks - 1) * share + count - share;
}

#define FUNCTION_OF_COUNTS(suffix, type_of_counts)                                                 \
    static Bytes sum_of_others##suffix(const type_of_counts counts[], MPI_Comm comm)               \
    {                                                                                              \
        Bytes sum = 0;                                                                             \
        for (int rank = 0; rank <= others(comm); rank++)                                           \
            if (rank != rank_in(comm))                                                             \
                sum += counts[rank];                                                               \
        return sum;                                                                                \
    }                                                                                              \
    static Bytes bytes_of_others##suffix(const type_of_counts counts[],                            \
                                         const MPI_Datatype types[], MPI_Comm comm)                \
    {                                                                                              \
        Bytes sum = 0;                                                                             \
        for (int rank = 0; rank <= others(comm); rank++)                                           \
            if (rank != rank_in(comm))                                                             \
                sum += bytes_of(counts[rank], types[rank]);                                        \
        return sum;                                                                                \
    }

FUNCTION_OF_COUNTS(, int)
#if MPI_VERSION >= 4
FUNCTION_OF_COUNTS(_c, MPI_Count)
#endif

/* ---- notes ---- */

static void add_call(const char *name, Bytes received)
{
    for (int place = 0; place < MOST_CALLS; place++) {
        if (calls[place].name == NULL)
            calls[place].name = name;
        if (strcmp(calls[place].name, name) == 0) {
            calls[place].times++;
            calls[place].received += received;
            return;
        }
    }
    stop_with("more kinds of calls than MOST_CALLS");
}

static void note_received(const char *name, Bytes received)
{
    if (!is_counting)
        return;
    pthread_mutex_lock(&lock);
    add_call(name, received);
    pthread_mutex_unlock(&lock);
}

static void note_sent(const char *name, Bytes bytes, int to, int is_control)
{
    if (!is_counting)
        return;
    pthread_mutex_lock(&lock);
    add_call(name, 0);
    if (to >= 0 && to != rank_in(MPI_COMM_WORLD))
        sent[is_control][to] += bytes;
    pthread_mutex_unlock(&lock);
}

static int rank_in_world(int rank, MPI_Group group)
{
    MPI_Group world;
    int found;
    if (rank == MPI_PROC_NULL)
        return -1;
    PMPI_Comm_group(MPI_COMM_WORLD, &world);
    PMPI_Group_translate_ranks(group, 1, &rank, world, &found);
    PMPI_Group_free(&world);
    return found == MPI_UNDEFINED ? -1 : found;
}

static int receiver(int to, MPI_Comm comm)
{
    MPI_Group group;
    PMPI_Comm_group(comm, &group);
    int found = rank_in_world(to, group);
    PMPI_Group_free(&group);
    return found;
}

static int target_of(int to, MPI_Win window)
{
    MPI_Group group;
    PMPI_Win_get_group(window, &group);
    int found = rank_in_world(to, group);
    PMPI_Group_free(&group);
    return found;
}

static void note_message(const char *name, Bytes bytes, int to, int tag, MPI_Comm comm)
{
    if (is_counting)
        note_sent(name, bytes, receiver(to, comm), tag == control_tag);
}

static void note_put(const char *name, Bytes bytes, int target, MPI_Win window)
{
    if (is_counting)
        note_sent(name, bytes, target_of(target, window), 0);
}

static void note_get(const char *name, Bytes bytes, int target, MPI_Win window)
{
    if (is_counting)
        note_received(name, target_of(target, window) == rank_in(MPI_COMM_WORLD) ? 0 : bytes);
}

/* ---- prepared calls: noted whenever they are started ---- */

static void remember(struct Prepared call)
{
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < MOST_REQUESTS && prepared[place].name != NULL)
        place++;
    if (place == MOST_REQUESTS)
        stop_with("more prepared calls than MOST_REQUESTS");
    prepared[place] = call;
    pthread_mutex_unlock(&lock);
}

static void remember_message(const char *name, Bytes bytes, int to, int tag, MPI_Comm comm,
                             MPI_Request request)
{
    struct Prepared call = {request, name, 0, bytes, receiver(to, comm), tag == control_tag};
    remember(call);
}

static void remember_received(const char *name, Bytes received, MPI_Request request)
{
    struct Prepared call = {request, name, received, 0, -1, 0};
    remember(call);
}

static struct Prepared *find_prepared(MPI_Request request)
{
    for (int place = 0; place < MOST_REQUESTS; place++)
        if (prepared[place].name != NULL && prepared[place].request == request)
            return &prepared[place];
    return NULL; /* a receive */
}

static void note_start(MPI_Request request)
{
    struct Prepared *call = find_prepared(request);
    if (call == NULL)
        return;
    if (call->received)
        note_received(call->name, call->received);
    else
        note_sent(call->name, call->sent, call->to, call->is_control);
}

int MPI_Start(MPI_Request *request)
{
    note_start(*request);
    return PMPI_Start(request);
}

int MPI_Startall(int count, MPI_Request requests[])
{
    for (int place = 0; place < count; place++)
        note_start(requests[place]);
    return PMPI_Startall(count, requests);
}

int MPI_Request_free(MPI_Request *request)
{
    struct Prepared *call = find_prepared(*request);
    if (call != NULL)
        call->name = NULL;
    return PMPI_Request_free(request);
}

/* ---- what is counted ---- */

static void write_list(FILE *file, const char *name, const Bytes *numbers)
{
    fprintf(file, ", \"%s\": [", name);
    for (int rank = 0; rank < world_size; rank++)
        fprintf(file, rank ? ", %lld" : "%lld", numbers[rank]);
    fprintf(file, "]");
}

static void write_counts(void)
{
    char path[4096];
    const char *folder = getenv("PMPI_COUNTS");
    snprintf(path, sizeof path, "%s/%d.jsonl", folder ? folder : ".", rank_in(MPI_COMM_WORLD));
    FILE *file = fopen(path, "a");
    if (file == NULL) {
        stop_with("cannot write the file of counts");
        return;
    }
    fprintf(file, "{\"ranks\": %d, \"calls\": {", world_size);
    for (int place = 0; place < MOST_CALLS && calls[place].name; place++) {
        const struct Call *call = &calls[place];
        const char *comma = place ? ", " : "";
        fprintf(file, "%s\"%s\": [%ld, %lld]", comma, call->name, call->times, call->received);
    }
    fprintf(file, "}");
    write_list(file, "sent", sent[0]);
    write_list(file, "sent_control", sent[1]);
    fprintf(file, "}\n");
    fclose(file);
}

int MPI_Pcontrol(const int level, ...)
{
    if (level && !is_counting) {
        const char *tag = getenv("PMPI_CONTROL_TAG");
        control_tag = tag ? atoi(tag) : -1;
        world_size = (int)others(MPI_COMM_WORLD) + 1;
        memset(calls, 0, sizeof calls);
        for (int kind = 0; kind < 2; kind++) {
            free(sent[kind]);
            sent[kind] = calloc(world_size, sizeof(Bytes));
        }
        is_counting = 1;
    } else if (!level && is_counting) {
        is_counting = 0;
        write_counts();
    }
    return MPI_SUCCESS;
}

/* ---- the calls: with counts of 32 bits, and of MPI 4 with large ones ---- */

#define JOIN_NOW(name, suffix) name##suffix
#define JOIN(name, suffix) JOIN_NOW(name, suffix)
#define FUNCTION(name) JOIN(name, SUFFIX)

#define COUNT int
#define PLACE int
#define SUFFIX
#include "calls.h"
#undef COUNT
#undef PLACE
#undef SUFFIX

#if MPI_VERSION >= 4
#define COUNT MPI_Count
#define PLACE MPI_Aint
#define SUFFIX _c
#include "calls.h"
#endif
