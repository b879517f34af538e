/* SPDX-License-Identifier: Apache-2.0
 *
 * User Mode Linux 6.1 keeps the first 2696 bytes of a process's vector registers, all but those of AMX. A kernel on a
 * processor with AMX takes nothing but the whole state: this adds the rest, as it is at the start of a process.
 * Loaded with LD_PRELOAD.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define XSTATE 0x202
#define OFFSET_OF_FEATURES 512
#define FEATURES_THAT_ARE_KEPT 0x2ff

static char whole[1 << 16] __attribute__((aligned(64)));
static size_t whole_bytes;

static long call(long request, long process, long address, long data) {
    return syscall(SYS_ptrace, request, process, address, data);
}

long ptrace(enum __ptrace_request request, ...) {
    va_list arguments;
    va_start(arguments, request);
    long process = va_arg(arguments, int);
    long address = va_arg(arguments, long);
    long data = va_arg(arguments, long);
    va_end(arguments);
    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word;
        long found = call(request, process, address, (long)&word);
        if (found < 0) return found;
        errno = 0;
        return word;
    }
    if (request != PTRACE_SETREGSET || address != XSTATE) return call(request, process, address, data);
    const struct iovec *given = (const struct iovec *)data;
    if (whole_bytes == 0) {
        struct iovec asked = {whole, sizeof whole};
        if (call(PTRACE_GETREGSET, process, XSTATE, (long)&asked) < 0) return -1;
        whole_bytes = asked.iov_len;
    }
    size_t kept = given->iov_len < whole_bytes ? given->iov_len : whole_bytes;
    memset(whole, 0, whole_bytes);
    memcpy(whole, given->iov_base, kept);
    if (kept < whole_bytes) *(uint64_t *)(whole + OFFSET_OF_FEATURES) &= FEATURES_THAT_ARE_KEPT;
    struct iovec set = {whole, whole_bytes};
    return call(PTRACE_SETREGSET, process, XSTATE, (long)&set);
}
