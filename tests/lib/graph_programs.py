"""How a compiled job is launched as CUDA graphs."""


def program_of(compiled):
    """Return the program of a compiled job that has one."""
    ((_, found),) = compiled.runner.programs.values()
    return found


def captured_steps(program):
    """Return how many steps are launched in graphs."""
    captured = [stretch for stretch in program.stretches if stretch.is_captured]
    return sum(stretch.stop - stretch.first for stretch in captured)
