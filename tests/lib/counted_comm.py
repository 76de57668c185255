"""Counts of a communicator's calls, those that are prepared included."""

# All payload but sums goes through one function, which gets the name of the call.
EXCHANGES = ("alltoallv", "allgatherv", "sendrecv")


def watch(comm, names, note):
    """Call note(name) whenever one of these methods of a communicator does something."""
    prepare = comm.prepare_exchange

    def prepare_watched(call, *arguments):
        name = call.split("(")[0]
        exchange = prepare(call, *arguments)

        def exchange_and_note():
            note(name)
            exchange()

        return exchange_and_note if name in names else exchange

    comm.prepare_exchange = prepare_watched

    def watched(name, method):
        def call_and_note(*arguments):
            note(name)
            return method(*arguments)

        return call_and_note

    for name in names:
        if name not in EXCHANGES:
            setattr(comm, name, watched(name, getattr(comm, name)))
