/* The MPI calls that count.c counts, with counts of type COUNT and displacements of type PLACE.
 * FUNCTION gives the name of a call the suffix of these types; count.c includes this file once for
 * each of them. Every call is noted, then made.
 */

#define LIST(...) __VA_ARGS__

/* ---- point to point: the sender knows how much goes where ---- */

#define SEND(name)                                                                                 \
    int FUNCTION(MPI_##name)(const void *buffer, COUNT count, MPI_Datatype type, int to, int tag,  \
                             MPI_Comm comm)                                                        \
    {                                                                                              \
        note_message("MPI_" #name, bytes_of(count, type), to, tag, comm);                          \
        return FUNCTION(PMPI_##name)(buffer, count, type, to, tag, comm);                          \
    }
#define START_SEND(name)                                                                           \
    int FUNCTION(MPI_##name)(const void *buffer, COUNT count, MPI_Datatype type, int to, int tag,  \
                             MPI_Comm comm, MPI_Request *request)                                  \
    {                                                                                              \
        note_message("MPI_" #name, bytes_of(count, type), to, tag, comm);                          \
        return FUNCTION(PMPI_##name)(buffer, count, type, to, tag, comm, request);                 \
    }
#define PREPARE_SEND(name)                                                                         \
    int FUNCTION(MPI_##name)(const void *buffer, COUNT count, MPI_Datatype type, int to, int tag,  \
                             MPI_Comm comm, MPI_Request *request)                                  \
    {                                                                                              \
        int status = FUNCTION(PMPI_##name)(buffer, count, type, to, tag, comm, request);           \
        remember_message("MPI_" #name, bytes_of(count, type), to, tag, comm, *request);            \
        return status;                                                                             \
    }

SEND(Send)
SEND(Bsend)
SEND(Ssend)
SEND(Rsend)
START_SEND(Isend)
START_SEND(Ibsend)
START_SEND(Issend)
START_SEND(Irsend)
PREPARE_SEND(Send_init)
PREPARE_SEND(Bsend_init)
PREPARE_SEND(Ssend_init)
PREPARE_SEND(Rsend_init)

int FUNCTION(MPI_Sendrecv)(const void *buffer, COUNT count, MPI_Datatype type, int to, int tag,
                           void *into, COUNT most, MPI_Datatype type_into, int source,
                           int source_tag, MPI_Comm comm, MPI_Status *status)
{
    note_message("MPI_Sendrecv", bytes_of(count, type), to, tag, comm);
    return FUNCTION(PMPI_Sendrecv)(buffer, count, type, to, tag, into, most, type_into, source,
                                   source_tag, comm, status);
}

int FUNCTION(MPI_Sendrecv_replace)(void *buffer, COUNT count, MPI_Datatype type, int to, int tag,
                                   int source, int source_tag, MPI_Comm comm, MPI_Status *status)
{
    note_message("MPI_Sendrecv_replace", bytes_of(count, type), to, tag, comm);
    return FUNCTION(PMPI_Sendrecv_replace)(buffer, count, type, to, tag, source, source_tag, comm,
                                           status);
}

/* ---- one-sided: the origin knows how much goes where ---- */

int FUNCTION(MPI_Put)(const void *origin, COUNT count, MPI_Datatype type, int target,
                      MPI_Aint place, COUNT target_count, MPI_Datatype target_type, MPI_Win window)
{
    note_put("MPI_Put", bytes_of(count, type), target, window);
    return FUNCTION(PMPI_Put)(origin, count, type, target, place, target_count, target_type,
                              window);
}

int FUNCTION(MPI_Accumulate)(const void *origin, COUNT count, MPI_Datatype type, int target,
                             MPI_Aint place, COUNT target_count, MPI_Datatype target_type,
                             MPI_Op operation, MPI_Win window)
{
    note_put("MPI_Accumulate", bytes_of(count, type), target, window);
    return FUNCTION(PMPI_Accumulate)(origin, count, type, target, place, target_count, target_type,
                                     operation, window);
}

int FUNCTION(MPI_Get)(void *origin, COUNT count, MPI_Datatype type, int target, MPI_Aint place,
                      COUNT target_count, MPI_Datatype target_type, MPI_Win window)
{
    note_get("MPI_Get", bytes_of(count, type), target, window);
    return FUNCTION(PMPI_Get)(origin, count, type, target, place, target_count, target_type,
                              window);
}

/* ---- collective: blocking, with a request, and prepared ---- */

#if MPI_VERSION >= 4
#define PREPARED(name, received, parameters, arguments)                                            \
    int FUNCTION(MPI_##name##_init)(parameters, MPI_Info info, MPI_Request * request)              \
    {                                                                                              \
        int status = FUNCTION(PMPI_##name##_init)(arguments, info, request);                       \
        remember_received("MPI_" #name "_init", received, *request);                               \
        return status;                                                                             \
    }
#else
#define PREPARED(name, received, parameters, arguments)
#endif
#define COLLECTIVE(name, started, received, parameters, arguments)                                 \
    int FUNCTION(MPI_##name)(parameters)                                                           \
    {                                                                                              \
        note_received("MPI_" #name, received);                                                     \
        return FUNCTION(PMPI_##name)(arguments);                                                   \
    }                                                                                              \
    int FUNCTION(MPI_##started)(parameters, MPI_Request * request)                                 \
    {                                                                                              \
        note_received("MPI_" #started, received);                                                  \
        return FUNCTION(PMPI_##started)(arguments, request);                                       \
    }                                                                                              \
    PREPARED(name, received, LIST(parameters), LIST(arguments))

COLLECTIVE(Bcast, Ibcast, is_root(root, comm) ? 0 : bytes_of(count, type),
           LIST(void *buffer, COUNT count, MPI_Datatype type, int root, MPI_Comm comm),
           LIST(buffer, count, type, root, comm))

COLLECTIVE(Gather, Igather, is_root(root, comm) ? others(comm) * bytes_of(most, into) : 0,
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive, COUNT most,
                MPI_Datatype into, int root, MPI_Comm comm),
           LIST(send, count, type, receive, most, into, root, comm))

COLLECTIVE(Gatherv, Igatherv,
           is_root(root, comm) ? FUNCTION(sum_of_others)(counts, comm) * size_of(into) : 0,
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive,
                const COUNT counts[], const PLACE places[], MPI_Datatype into, int root,
                MPI_Comm comm),
           LIST(send, count, type, receive, counts, places, into, root, comm))

COLLECTIVE(Scatter, Iscatter, is_root(root, comm) ? 0 : bytes_of(most, into),
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive, COUNT most,
                MPI_Datatype into, int root, MPI_Comm comm),
           LIST(send, count, type, receive, most, into, root, comm))

COLLECTIVE(Scatterv, Iscatterv, is_root(root, comm) ? 0 : bytes_of(most, into),
           LIST(const void *send, const COUNT counts[], const PLACE places[], MPI_Datatype type,
                void *receive, COUNT most, MPI_Datatype into, int root, MPI_Comm comm),
           LIST(send, counts, places, type, receive, most, into, root, comm))

COLLECTIVE(Allgather, Iallgather, others(comm) * bytes_of(most, into),
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive, COUNT most,
                MPI_Datatype into, MPI_Comm comm),
           LIST(send, count, type, receive, most, into, comm))

COLLECTIVE(Allgatherv, Iallgatherv, FUNCTION(sum_of_others)(counts, comm) * size_of(into),
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive,
                const COUNT counts[], const PLACE places[], MPI_Datatype into, MPI_Comm comm),
           LIST(send, count, type, receive, counts, places, into, comm))

COLLECTIVE(Alltoall, Ialltoall, others(comm) * bytes_of(most, into),
           LIST(const void *send, COUNT count, MPI_Datatype type, void *receive, COUNT most,
                MPI_Datatype into, MPI_Comm comm),
           LIST(send, count, type, receive, most, into, comm))

COLLECTIVE(Alltoallv, Ialltoallv, FUNCTION(sum_of_others)(most, comm) * size_of(into),
           LIST(const void *send, const COUNT counts[], const PLACE places[], MPI_Datatype type,
                void *receive, const COUNT most[], const PLACE places_into[], MPI_Datatype into,
                MPI_Comm comm),
           LIST(send, counts, places, type, receive, most, places_into, into, comm))

COLLECTIVE(Alltoallw, Ialltoallw, FUNCTION(bytes_of_others)(most, into, comm),
           LIST(const void *send, const COUNT counts[], const PLACE places[],
                const MPI_Datatype types[], void *receive, const COUNT most[],
                const PLACE places_into[], const MPI_Datatype into[], MPI_Comm comm),
           LIST(send, counts, places, types, receive, most, places_into, into, comm))

COLLECTIVE(Reduce, Ireduce, is_root(root, comm) ? others(comm) * bytes_of(count, type) : 0,
           LIST(const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op operation,
                int root, MPI_Comm comm),
           LIST(send, receive, count, type, operation, root, comm))

COLLECTIVE(Allreduce, Iallreduce, allreduce_elements(count, comm) * size_of(type),
           LIST(const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op operation,
                MPI_Comm comm),
           LIST(send, receive, count, type, operation, comm))

COLLECTIVE(Reduce_scatter, Ireduce_scatter,
           others(comm) * bytes_of(counts[rank_in(comm)], type),
           LIST(const void *send, void *receive, const COUNT counts[], MPI_Datatype type,
                MPI_Op operation, MPI_Comm comm),
           LIST(send, receive, counts, type, operation, comm))

COLLECTIVE(Reduce_scatter_block, Ireduce_scatter_block, others(comm) * bytes_of(count, type),
           LIST(const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op operation,
                MPI_Comm comm),
           LIST(send, receive, count, type, operation, comm))

COLLECTIVE(Scan, Iscan, rank_in(comm) ? bytes_of(count, type) : 0,
           LIST(const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op operation,
                MPI_Comm comm),
           LIST(send, receive, count, type, operation, comm))

COLLECTIVE(Exscan, Iexscan, rank_in(comm) ? bytes_of(count, type) : 0,
           LIST(const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op operation,
                MPI_Comm comm),
           LIST(send, receive, count, type, operation, comm))

#undef LIST
#undef SEND
#undef START_SEND
#undef PREPARE_SEND
#undef PREPARED
#undef COLLECTIVE
