// A program of Go with functions of Go, assembly and C, which prints what each of them gets.
package main

// int __attribute__((noinline)) scaled(int value, int factor) { return value * factor; }
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
)

type Pair struct{ A, B int64 }

//go:noinline
func Sum(a, b, c, d, e, f, g, h, i int64) int64 {
	return a + b*2 + c*3 + d*4 + e*5 + f*6 + g*7 + h*8 + i*9
}

//go:noinline
func (p *Pair) Scale(n int64, name string) (int64, string) {
	return p.A*n + p.B, name + "!"
}

// Deep needs more stack than a goroutine begins with: the runtime moves the stack, with all that are on it.
//
//go:noinline
func Deep(n int) int {
	var space [512]byte
	space[n%512] = byte(n)
	if n == 0 {
		return int(space[0])
	}
	return Deep(n-1) + 1
}

func main() {
	count, _ := strconv.ParseInt(os.Args[1], 10, 64)
	done := make(chan bool)
	go func() {
		p := &Pair{3, 4}
		for k := int64(0); k < count; k++ {
			fmt.Println("sum", k, k+1, k+2, k+3, k+4, k+5, k+6, k+7, k+8,
				Sum(k, k+1, k+2, k+3, k+4, k+5, k+6, k+7, k+8))
			value, text := p.Scale(k, "name"+strconv.FormatInt(k, 10))
			fmt.Println("scale", k, value, text)
			fmt.Println("scaled", k, k+100, int64(C.scaled(C.int(k), C.int(k+100))))
		}
		fmt.Println("deep", Deep(2000))
		runtime.GC()
		done <- true
	}()
	<-done
}
