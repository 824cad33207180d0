module godemo

go 1.17
