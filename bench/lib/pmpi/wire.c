/* Counts the bytes that a process writes to network sockets, by any library in it.
 *
 *     cc -shared -fPIC -o libwire.so wire.c -ldl
 *
 * It is loaded by LD_PRELOAD. If the ranks of an MPI program talk by TCP only, `wire_bytes` says
 * what MPI's own algorithms send, with their headers.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long long bytes;

static void add(int socket, ssize_t written)
{
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (written <= 0 || getsockname(socket, (struct sockaddr *)&address, &length) != 0)
        return;
    if (address.ss_family != AF_UNIX) /* the launcher's */
        __atomic_add_fetch(&bytes, written, __ATOMIC_RELAXED);
}

long long wire_bytes(void)
{
    return __atomic_load_n(&bytes, __ATOMIC_RELAXED);
}

ssize_t send(int socket, const void *buffer, size_t length, int flags)
{
    ssize_t written = NEXT(send)(socket, buffer, length, flags);
    add(socket, written);
    return written;
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags)
{
    ssize_t written = NEXT(sendmsg)(socket, message, flags);
    add(socket, written);
    return written;
}

ssize_t sendto(int socket, const void *buffer, size_t length, int flags,
               const struct sockaddr *address, socklen_t address_length)
{
    ssize_t written = NEXT(sendto)(socket, buffer, length, flags, address, address_length);
    add(socket, written);
    return written;
}

ssize_t writev(int socket, const struct iovec *pieces, int count)
{
    ssize_t written = NEXT(writev)(socket, pieces, count);
    add(socket, written);
    return written;
}
