#include "common/cores.h"

#include <sched.h>

namespace paceline {

std::vector<int> allowed_cores() {
  cpu_set_t allowed;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cores;  // more of them than the set can hold
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

void move_to(int core) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (!CPU_ISSET(core, &allowed) || CPU_COUNT(&allowed) == 1) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (::sched_setaffinity(0, sizeof(only), &only) == 0) ::sched_setaffinity(0, sizeof(allowed), &allowed);
}

}  // namespace paceline
