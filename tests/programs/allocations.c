/* many() takes 36 blocks of 100 bytes, of which 20 are given back, and few() one of 300, which is not. */
#include <stdlib.h>

void *take(long size) { return malloc(size); }

void give(void *block) { free(block); }

static void *volatile kept[36];

void many(void) {
  for (int i = 0; i < 36; i++) kept[i] = take(100);
}

void few(void) { kept[0] = take(300); }

int main(void) {
  many();
  for (int i = 0; i < 20; i++) give(kept[i]);
  few();
  return 0;
}
