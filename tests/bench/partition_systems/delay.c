// A link between two network namespaces that takes its time, for kernels without netem.
//
//     delay PID_A PID_B DELAY_US MBIT        (as root; "ready" on standard output, then until it is killed)
//
// Interfaces vA and vB in the namespaces of two processes. What one sends arrives at the other after its turn on a link
// of MBIT Mbit/s (0: no limit) and DELAY_US more; each way is a link of its own. What finds QUEUE packets waiting stays
// in the sender's queue.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE = 4096, PACKET = 9216 };

struct way {
    int from, to;
    unsigned long arrived, left;
    double idle;  // when the link is free again
    double due[QUEUE];
    int size[QUEUE];
    char data[QUEUE][PACKET];
};

static struct way ways[2];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void need(int holds, const char* what) {
    if (holds) return;
    perror(what);
    exit(1);
}

static int interface_of(const char* pid, const char* name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    const int space = open(path, O_RDONLY | O_CLOEXEC);
    need(space >= 0 && setns(space, CLONE_NEWNET) == 0, path);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    need(device >= 0 && ioctl(device, TUNSETIFF, &request) == 0, "/dev/net/tun");
    close(space);
    return device;
}

static void take(struct way* way, double at, double delay, double bytes_per_s) {
    while (way->arrived - way->left < QUEUE) {
        const int slot = way->arrived % QUEUE;
        const int size = read(way->from, way->data[slot], PACKET);
        if (size <= 0) return;
        const double start = way->idle > at ? way->idle : at;
        way->idle = start + (bytes_per_s > 0 ? size / bytes_per_s : 0);
        way->due[slot] = way->idle + delay;
        way->size[slot] = size;
        way->arrived++;
    }
}

static void give(struct way* way, double at) {
    for (; way->left != way->arrived && way->due[way->left % QUEUE] <= at; way->left++)
        if (write(way->to, way->data[way->left % QUEUE], way->size[way->left % QUEUE]) < 0) return;
}

int main(int count, char** words) {
    need(count == 5, "delay PID_A PID_B DELAY_US MBIT");
    const double delay = 1e-6 * atof(words[3]), bytes_per_s = 1e6 / 8 * atof(words[4]);
    const int a = interface_of(words[1], "vA"), b = interface_of(words[2], "vB");
    ways[0].from = ways[1].to = a;
    ways[1].from = ways[0].to = b;
    puts("ready");
    fflush(stdout);
    for (;;) {
        double wait = 1;
        struct pollfd files[2];
        for (int i = 0; i < 2; i++) {
            const struct way* way = &ways[i];
            const int full = way->arrived - way->left == QUEUE;
            files[i] = (struct pollfd){.fd = way->from, .events = full ? 0 : POLLIN};
            if (way->left != way->arrived) {
                const double rest = way->due[way->left % QUEUE] - now();
                if (rest < wait) wait = rest > 0 ? rest : 0;
            }
        }
        const struct timespec rest = {.tv_sec = (time_t)wait, .tv_nsec = (long)(1e9 * (wait - (time_t)wait))};
        ppoll(files, 2, &rest, NULL);
        for (int i = 0; i < 2; i++) {
            take(&ways[i], now(), delay, bytes_per_s);
            give(&ways[i], now());
        }
    }
}
