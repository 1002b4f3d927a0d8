// Loads Compose files as Docker Compose does, by its own library, and prints what it makes of them.
//
//	compose [--env-file FILE] [--profile NAME]... docker-compose.yml
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

type names []string

func (all *names) String() string { return fmt.Sprint(*all) }

func (all *names) Set(name string) error {
	*all = append(*all, name)
	return nil
}

func main() {
	var profiles, files names
	flag.Var(&profiles, "profile", "a profile; * for all")
	flag.Var(&files, "env-file", "variables")
	flag.Parse()
	if err := show(profiles, files); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func show(profiles, files []string) error {
	options, err := cli.NewProjectOptions(
		flag.Args(), cli.WithName("tierlog"), cli.WithProfiles(profiles),
		cli.WithEnvFiles(files...), cli.WithDotEnv,
	)
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	text, err := project.MarshalJSON()
	if err == nil {
		_, err = os.Stdout.Write(text)
	}
	return err
}
