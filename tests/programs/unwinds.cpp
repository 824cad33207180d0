/*
 * unwinds: leaves functions by exceptions and longjmp, and walks its stack in them; prints how often each came about: caught
 * exceptions, jumps, frames that backtrace() found, objects that were made, objects that were destroyed.
 */
#include <cstdio>
#include <csetjmp>
#include <stdexcept>
#include <execinfo.h>
static jmp_buf env; static long caught, jumped, frames, made, gone;
struct Counted { Counted(){made++;} ~Counted(){gone++;} };
extern "C" __attribute__((noipa)) void inner(long n){ if(n%3==0) throw std::runtime_error("x"); if(n%3==1) longjmp(env,1); void*b[32]; frames+=backtrace(b,32); }
extern "C" __attribute__((noipa)) long middle(long n){ if(n%3==1){ inner(n); return 0;} Counted c; inner(n); asm volatile(""); return n+1; }
extern "C" __attribute__((noipa)) long outer(long n){ try { return middle(n)+2; } catch(std::exception&e){ caught++; return -1; } }
int main(){ for(long n=0;n<3000;n++){ if(setjmp(env)){ jumped++; continue;} outer(n);} printf("%ld %ld %ld %ld %ld\n",caught,jumped,frames,made,gone); }
