/* SPDX-License-Identifier: Apache-2.0 */
#include <kda/kda.h>
#include <stdio.h>

int main(void) {
  kda_problem problem;
  kda_problem_init(&problem);
  printf("C consumer: libkda %s, empty problem: %s\n", kda_version(),
         kda_status_name(kda_validate(&problem)));
  return kda_validate(&problem) == KDA_OK ? 0 : 1;
}
