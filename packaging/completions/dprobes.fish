function _dprobes_completion
    set -l response (env _DPROBES_COMPLETE=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) dprobes 2>/dev/null)
    for completion in $response
        # There may be more commas in the value.
        set -l found (string split -m 1 "," -- $completion)
        switch $found[1]
            case dir
                __fish_complete_directories $found[2]
            case file
                __fish_complete_path $found[2]
            case plain
                echo $found[2]
        end
    end
end

complete --no-files --command dprobes --arguments "(_dprobes_completion)"

