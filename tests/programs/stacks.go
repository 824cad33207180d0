// Calls, closures, goroutines and sorting, for the walk up their stacks.
package main

import (
	"fmt"
	"sort"
	"strings"
)

type shape interface{ area(depth int) int }
type square struct{ side int }

func (s square) area(depth int) int {
	if depth == 0 {
		return len(strings.Repeat("x", s.side))
	}
	return s.area(depth-1) + 1
}

func main() {
	results := make(chan int)
	for n := 0; n < 4; n++ {
		go func(n int) {
			total := 0
			for m := 0; m < 3000; m++ {
				numbers := []int{5, m, 3, n, 9}
				sort.Slice(numbers, func(a, b int) bool { return numbers[a] < numbers[b] })
				total += shape(square{m % 17}).area(m % 9)
			}
			results <- total
		}(n)
	}
	total := 0
	for n := 0; n < 4; n++ {
		total += <-results
	}
	fmt.Println(total)
}
